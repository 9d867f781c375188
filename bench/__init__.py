"""The benchmarks: `python -m bench`. Everything is compared within one run; nothing here is a test."""
