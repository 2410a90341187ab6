"""The work of a cluster while faults happen, and how it is judged. The table of all kinds of streams."""

from benchmarks.faults.traffics.attached import ATTACHED
from benchmarks.faults.traffics.images import IMAGES
from benchmarks.faults.traffics.speculation import SCHEDULERS_DRAFT, WORKERS_DRAFT
from benchmarks.faults.traffics.streams import PLAIN
from benchmarks.faults.traffics.structured import STRUCTURED

STREAMS = {
    "plain": PLAIN,
    "structured": STRUCTURED,
    "attached": ATTACHED,
    "images": IMAGES,
    "drafts": SCHEDULERS_DRAFT,
    "model-drafts": WORKERS_DRAFT,
}
