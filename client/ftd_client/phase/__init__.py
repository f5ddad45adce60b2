"""From a model that was just offloaded to one that streams by measured times."""
