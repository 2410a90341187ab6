"""A scheduler that only lives."""

from common import start, wait_until_told_to_end

start("scheduler")
wait_until_told_to_end("scheduler")
