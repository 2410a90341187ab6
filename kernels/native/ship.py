"""Compiles the CPU kernels of every supported CPU into this package, for images without a compiler."""

import logging

from kernels.native.build import PATHS, ship

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for path in PATHS:
        ship(path)
