"""What `dcpp demo` shows of the library on real images: few connections, what is kept, doubt, a smaller model."""

from dropconnectpp.lab.runs.demo.showing import Settings, show

__all__ = ["Settings", "show"]
