"""Brings constraints into their canonical form, compiles them, and reports their errors.

`python -m runtime.grammar.compiling.checking DIRECTORY VOCAB_SIZE EOS_TOKEN_IDS SECONDS MIB`, the first three as a
Vocabulary takes them, ids separated by commas. SECONDS: after so many it ends itself, if nobody has done it.

A process of its own, because no limits hold for all that is done. The library takes gigabytes for a regular expression
of some bytes before it asks for the first of its limits, and deep nesting overflows a stack. Python's regular
expressions keep the interpreter's lock: 64 KiB of line ends took 100 s, in which no other thread would have run.

Reads constraints from its standard input and answers each with the canonical form or what is wrong (messages.py).
"""

import os
import resource
import signal
import sys
from pathlib import Path

import numpy as np

from protos.inference_pb2 import Constraint
from runtime.free_memory import give_back_free_memory
from runtime.grammar.compiling.messages import REFUSED, TAKEN, read_message, write_message
from runtime.grammar.constraints import canonical_constraint, library_grammar
from runtime.grammar.engine import ConstraintError
from runtime.grammar.llguidance_matcher import new_matcher
from runtime.grammar.vocabulary import Vocabulary

# Streams come first: beside them this process gets a third of a core.
_NICE = 5


def main(directory: str, vocab_size: str, eos_token_ids: str, seconds: str, mib: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    try:
        vocabulary = Vocabulary(
            Path(directory), int(vocab_size), [int(each) for each in eos_token_ids.split(",") if each]
        )
    except ValueError as error:
        write_message(sys.stdout.buffer, str(error).encode())
        return
    # What every grammar needs is there before memory is bounded.
    _error('start: "a" /b+/', vocabulary)
    write_message(sys.stdout.buffer, b"")
    while (asked := read_message(sys.stdin.buffer)) is not None:
        _bound_memory(int(mib))
        # Ends this process if the one that asks is no longer there to do it.
        signal.setitimer(signal.ITIMER_REAL, float(seconds) + 1)
        answer = _answer(Constraint.FromString(asked), vocabulary)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_message(sys.stdout.buffer, answer)
        give_back_free_memory()


def _answer(constraint: Constraint, vocabulary: Vocabulary) -> bytes:
    try:
        found = canonical_constraint(constraint)
        grammar = library_grammar(found, vocabulary.special_tokens)
    except ConstraintError as error:
        return REFUSED + str(error).encode(errors="backslashreplace")
    except RecursionError:
        return REFUSED + b"its references nest too deep: use fewer within each other"
    if error := _error(grammar, vocabulary):
        return REFUSED + f"{found.WhichOneof('kind')}: {error}".encode()
    return TAKEN + found.SerializeToString()


def _error(grammar: str, vocabulary: Vocabulary) -> str:
    matcher = new_matcher(grammar, vocabulary)
    # The first mask has limits of its own.
    matcher.fill_mask(np.empty((vocabulary.size + 31) // 32, np.int32))
    return matcher.error


def _bound_memory(mib: int) -> None:
    """Bounds what is added to the address space that there is now."""
    with open("/proc/self/statm", "rb") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = size + mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


if __name__ == "__main__":
    main(*sys.argv[1:])
