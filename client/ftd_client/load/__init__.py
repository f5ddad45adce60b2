"""A model made resident on devices: where its bytes go, and the ways there."""
