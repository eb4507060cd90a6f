"""What the tests of convolution and pooling share.

- `direct`: the whole-array operations and their adjoints in numpy, exact on integers. Shares nothing with the library.
- `draws`: random layers with their partitions and their input's blocks.
- `played`: all workers of a layer in one process, from the layer's own plans.
- `programs`: many layers compiled as one program on every worker of an MPI world.
"""
