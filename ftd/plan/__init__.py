"""What stays on the GPU, what streams, where it lands and when its copy may start: pure functions of measurements."""
