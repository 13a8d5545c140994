"""Plan and run mixture-of-experts language models whose experts do not fit the GPU."""

__version__ = "0.1.0"
