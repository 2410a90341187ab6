"""The screens above the tables: a question before anything is changed, and what happened to a request."""

from io import StringIO

from rich.console import Console
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from octavo.client.admin import Explanation
from octavo.timeline import draw


class Confirm(ModalScreen[bool]):
    """Asks before an action. Only `y` is a yes."""

    BINDINGS = [Binding("y", "answer(True)", "Yes"), Binding("n,escape,q", "answer(False)", "No")]  # noqa: RUF012

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(id="question"):
            yield Static(Text(self._question))
            yield Static(Text("y: yes    n: no", "bold"))

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class Explained(ModalScreen[None]):
    """Shows the timelines of a request."""

    BINDINGS = [Binding("escape,q,enter", "dismiss", "Back")]  # noqa: RUF012

    def __init__(self, explanation: Explanation, width: int) -> None:
        super().__init__()
        self._text = _drawn(explanation, width)

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="explained"):
            yield Static(self._text)
            yield Static(Text("Esc: back", "bold"))


def _drawn(explanation: Explanation, width: int) -> Text:
    """Draws the timelines as `octavo explain` does."""
    output = StringIO()
    console = Console(file=output, width=width, force_terminal=True, color_system="standard")
    for number, timeline in enumerate(explanation.timelines):
        if number:
            console.print()
        draw(timeline, console)
    for cause in explanation.unreachable:
        console.print(f"not reached: {cause}", markup=False)
    return Text.from_ansi(output.getvalue())
