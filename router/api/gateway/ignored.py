"""Reports unknown fields of requests: in the answer's headers, in a metric, and once in the log."""

import logging
import re
from collections.abc import Sequence

from prometheus_client import Counter
from starlette.responses import Response

HEADER = "x-octavo-ignored-fields"
OTHER = "other"
# Fields of other servers, by which a metric may name them: a client could invent any number of names.
_COUNTED = frozenset(
    {
        *("cache_prompt", "chat_format", "custom_params", "do_sample", "dry_base", "dry_multiplier", "dynatemp_range"),
        *("enable_thinking", "epsilon_cutoff", "eta_cutoff", "id_slot", "keep_alive", "lora_path", "max_new_tokens"),
        *("mirostat", "mirostat_eta", "mirostat_tau", "n_predict", "n_probs", "no_repeat_ngram_size", "num_ctx"),
        *("num_predict", "options", "plugins", "provider", "reasoning", "repeat_penalty", "return_hidden_states"),
        *("route", "safe_prompt", "samplers", "tfs_z", "top_a", "transforms", "typical_p", "xtc_probability"),
    }
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_LOGGED = 100

log = logging.getLogger("octavo.router.gateway")


class IgnoredFields:
    def __init__(self, counter: Counter) -> None:
        """counter: with a label `field`."""
        self._counter = counter
        self._logged: set[str] = set()

    def tell(self, names: Sequence[str], answer: Response) -> None:
        if not names:
            return
        shown = [name if _NAME.fullmatch(name) else OTHER for name in names]
        answer.headers[HEADER] = ", ".join(dict.fromkeys(shown))
        for name in shown:
            self._counter.labels(name if name in _COUNTED else OTHER).inc()
            if name not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(name)
                log.info("requests have a field %r, which is ignored; strict_fields refuses such fields", name)
