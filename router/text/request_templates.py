"""Chat templates that come with requests, compiled once while they are in use."""

import threading
from collections import OrderedDict
from collections.abc import Mapping

from router.text.chat_template import ChatTemplate

# Twice the longest template of a known model. One of this size compiles in 0.3 s.
MAX_TEMPLATE_CHARS = 2**15
# A compiled template takes up to 20 times its source: 20 MB if all are of the largest size.
MAX_TEMPLATES = 32


class RequestTemplates:
    """The last ones used. Safe to use from several threads."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: bos_token and the like, by name."""
        self._special_tokens = special_tokens
        self._compiled: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, source: str) -> ChatTemplate:
        """source: of at most MAX_TEMPLATE_CHARS. Raises TemplateError if it does not compile."""
        with self._lock:
            if (known := self._compiled.get(source)) is not None:
                self._compiled.move_to_end(source)
                return known
        # Outside of the lock: two threads may compile the same one, and the second result is kept.
        template = ChatTemplate(source, self._special_tokens, whose="request")
        with self._lock:
            self._compiled[source] = template
            if len(self._compiled) > MAX_TEMPLATES:
                self._compiled.popitem(last=False)
        return template
