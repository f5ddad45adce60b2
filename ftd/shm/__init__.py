"""Shared memory: names, byte layouts, locks and leases. Opens no socket and knows no checkpoint."""
