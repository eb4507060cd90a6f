"""The matrix primitive x transformation x partition x dtype.

- `cases`: `PRIMITIVES`, the one list of operators, each on given partitions and block shapes. A line there joins all.
- `reference`: the same operators in numpy, on all workers' blocks at once. Shares nothing with the library.
- `transformations`: `TRANSFORMATIONS`, each a function of an operator.
- `programs`: compiles many cases as one program on every worker, and compares with the reference.
"""
