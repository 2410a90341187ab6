"""A scheduler that does nothing until it is told to end."""

from common import start, wait_until_told_to_end

start("scheduler")
wait_until_told_to_end("scheduler")
