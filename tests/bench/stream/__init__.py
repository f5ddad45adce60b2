"""Streaming a model larger than its GPU memory, beside what users would pick instead: one model, one checkpoint, one
run, every contestant in a process of its own."""
