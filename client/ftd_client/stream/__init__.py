"""The streaming engine: blocks of weights pass through fixed places on the device, ahead of the compute."""
