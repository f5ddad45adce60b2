"""The one place that states the release and the protocol."""

__version__ = "0.1.0"

#: (major, minor) of the bytes that participants exchange: coordination block, slots, manifest, control frames.
#: Another major is refused; a higher minor only adds fields that older readers ignore.
PROTOCOL = (1, 1)
