"""Which tile of a matrix a program computes."""

import triton.language as tl

from kernels.tiles.jit import jit


@jit
def tile_of_program(tiles_m, tiles_n, group_m):
    """(row, column) of tiles of program_id(0). Programs of successive numbers go down group_m tiles, then on to the
    next column of tiles: those that run at the same time share rows and columns, which they find in L2."""
    program = tl.program_id(0)
    band = program // (group_m * tiles_n)
    in_band = program % (group_m * tiles_n)
    height = tl.minimum(tiles_m - band * group_m, group_m)
    return band * group_m + in_band % height, in_band // height
