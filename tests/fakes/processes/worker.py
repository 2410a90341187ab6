"""A worker that does nothing until it is told to end."""

from common import start, wait_until_told_to_end

start("worker")
wait_until_told_to_end("worker")
