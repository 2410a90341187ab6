"""Exchanges modules of the library that are known by the formula that they compute. A module runs with made up numbers,
and stays as it is if its result differs in anything."""
