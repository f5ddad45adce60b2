"""Where weights come from: checkpoints read as headers first, bytes later."""
