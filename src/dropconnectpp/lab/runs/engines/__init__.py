"""Where tasks run: this process, the devices of this host, or a Ray cluster."""
