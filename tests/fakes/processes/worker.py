"""A worker that only lives."""

from common import start, wait_until_told_to_end

start("worker")
wait_until_told_to_end("worker")
