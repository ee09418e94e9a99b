"""Other frameworks' loops: one file each, imported by name, so that `import dropconnectpp` needs none of them."""
