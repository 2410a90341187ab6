"""Compares the paged attention for TPUs with the reference: python -m benchmarks.kernels.pallas_attention

In JAX's interpreter, on a CPU, for lengths whose page sizes are 16 to 256. It needs the extra `tpu` and takes about a
minute. A line for each case: page size, rows, and the largest error over the largest number of the reference in
float64. --json prints them as JSON.
"""

import argparse
import itertools
import json

from octavo.plan.machine.tpu_pages import page_size
from tests.kernels.attention.test_paged_pallas import check

_LENGTHS = (200, 500, 1000, 2000, 4000)
_DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    for length, dtype in itertools.product(_LENGTHS, _DTYPES):
        size = page_size(length)
        lens = [1, size, length // 2 + 1, length]
        for name, queries in (("decodes", [1, 1, 1, 1]), ("decodes and chunks", [1, size, 1, 8])):
            error = check(queries, lens, size=size, dtype=dtype, head_size=128, heads=(8, 2))
            if as_json:
                print(
                    json.dumps(
                        {"max_model_len": length, "page_size": size, "dtype": dtype, "rows": name, "error": error}
                    )
                )
            else:
                print(f"max_model_len {length:5}: pages of {size:3}, {dtype:8}, {name:18}: error {error:.1e}")


if __name__ == "__main__":
    main()
