"""The CUDA calls of the product, behind one interface that tests can fake."""
