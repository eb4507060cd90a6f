"""Which of several ways to compute the same is the fastest, by what was measured."""
