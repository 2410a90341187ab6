"""Ends outputs that repeat themselves."""

from configs.sampling import MAX_PATTERN_SIZE
from protos.inference_pb2 import GenerateRequest, SamplingParams
from router.errors import InvalidRequest

FIELDS = frozenset({"repetition_detection"})
_FIELD = "sampling.repetition_detection"


def check(message: GenerateRequest) -> None:
    """Raises InvalidRequest."""
    detection = message.sampling.repetition_detection
    longest, shortest, count = detection.max_pattern_size, detection.min_pattern_size, detection.min_count
    if longest > MAX_PATTERN_SIZE:
        raise InvalidRequest(f"{_FIELD}.max_pattern_size={longest}: use at most {MAX_PATTERN_SIZE}, or 0 for off")
    if shortest > longest:
        raise InvalidRequest(f"{_FIELD}.min_pattern_size={shortest}: use at most max_pattern_size, which is {longest}")
    if longest and count < 2:
        raise InvalidRequest(f"{_FIELD}.min_count={count}: use at least 2")


def resolve(sampling: SamplingParams) -> None:
    """Fills in the shortest pattern; leaves out what is off."""
    detection = sampling.repetition_detection
    if detection.max_pattern_size:
        detection.min_pattern_size = max(detection.min_pattern_size, 1)
    else:
        sampling.ClearField("repetition_detection")
