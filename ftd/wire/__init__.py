"""The control socket: frames, messages, both ends."""
