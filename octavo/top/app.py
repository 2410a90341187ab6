"""The application: two tables that follow the cluster, and keys that act on the row under the cursor.

A screen above them asks before anything is changed, or shows what happened to a request."""

import time
from collections.abc import Callable
from io import StringIO

from rich.console import Console
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from octavo.client.admin import Admin, Explanation
from octavo.client.errors import OctavoError
from octavo.timeline import draw
from octavo.top.rows import (
    NUM_TEXTS,
    REPLICA_COLUMNS,
    REQUEST_COLUMNS,
    plain,
    replica_row,
    request_row,
    steps_text,
    summary,
)
from protos import admin_pb2 as pb
from runtime.telemetry.rates import RateMeter


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


_HINT = "Tab: the other table   Enter: explain the request"


class Top(App[None]):
    """Asks the router once a second, on a thread: a router that does not answer leaves the keys alive."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [  # noqa: RUF012
        Binding("p", "hold('paused')", "Pause"),
        Binding("d", "hold('drained')", "Drain"),
        Binding("r", "hold('none')", "Release"),
        Binding("m", "migrate", "Migrate"),
        Binding("q", "quit", "Quit"),
    ]
    CSS = """
    #summary { height: 2; }
    #replicas { height: auto; max-height: 40%; }
    #steps { height: auto; max-height: 5; }
    #requests { height: 1fr; }
    #note { height: 1; }
    Confirm, Explained { align: center middle; }
    #question { width: 90%; max-width: 76; height: auto; border: solid $warning; padding: 0 1; }
    #explained { width: 100%; height: 90%; border: solid $accent; padding: 0 1; }
    """

    def __init__(self, admin: Admin, target: str, *, interval: float = 1.0) -> None:
        """interval: seconds between two looks."""
        super().__init__()
        self._admin, self._target, self._interval = admin, target, interval
        self._meter = RateMeter()
        # Kept, for what a thread brings while the application ends finds no screen to look them up in.
        self._lines = {name: Static("", id=name, markup=False) for name in ("summary", "steps", "note")}
        self._tables: dict[str, DataTable[Text]] = {
            name: DataTable(id=name, cursor_type="row", cell_padding=1) for name in ("replicas", "requests")
        }
        # replica_id of each address.
        self._names: dict[str, str] = {}
        # Until when a line of news stays, on time.monotonic().
        self._news_until = 0.0

    def compose(self) -> ComposeResult:
        yield self._lines["summary"]
        yield self._tables["replicas"]
        yield self._lines["steps"]
        yield self._tables["requests"]
        yield self._lines["note"]
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        for table, columns in (("replicas", REPLICA_COLUMNS), ("requests", REQUEST_COLUMNS)):
            for number, name in enumerate(columns):
                align = "left" if number < NUM_TEXTS else "right"
                self._tables[table].add_column(Text(name, justify=align), key=name)
        self._lines["summary"].update(f"asking {self._target}")
        self.look()
        self.set_interval(self._interval, self.look)

    # --- What is shown

    def look(self) -> None:
        """Asks for the cluster's state, unless the last question has no answer yet."""
        if not any(worker.group == "look" and worker.is_running for worker in self.workers):
            self.run_worker(self._look, thread=True, group="look")

    def _look(self) -> None:
        try:
            view = self._admin.observe()
        except OctavoError as error:
            self._from_thread(self._tell, f"no answer: {error}; asking again", "red")
            return
        self._from_thread(self._show, view)

    def _show(self, view: pb.ObserveResponse) -> None:
        rates = self._meter.take(view, time.monotonic())
        self._lines["summary"].update(summary(view, rates, self._target))
        self._lines["steps"].update(steps_text(view.replicas))
        self._names = {each.address: each.replica_id for each in view.replicas}
        replicas = zip(view.replicas, rates.replicas, strict=True)
        _fill(self._tables["replicas"], {each.address: replica_row(each, of) for each, of in replicas})
        _fill(self._tables["requests"], {each.request_id: request_row(each) for each in view.requests})
        self._tell(_HINT if view.replicas else "this key sees its own requests only", "dim", is_news=False)

    def _tell(self, text: str, style: str = "", *, is_news: bool = True) -> None:
        """Shows a line. is_news: for some seconds only other news replaces it."""
        now = time.monotonic()
        if is_news:
            self._news_until = now + 4.0
        elif now < self._news_until:
            return
        self._lines["note"].update(Text(plain(text), style))

    # --- Keys

    def action_hold(self, state: str) -> None:
        address = self._chosen("replicas")
        if not address:
            self._tell("no replica is chosen", "red")
            return
        name = f"replica {self._names.get(address) or '?'} ({address})"
        question = {
            "paused": f"Pause {name}? This router sends it no new requests; its streams stay.",
            "drained": f"Drain {name}? Its streams at this router move to other replicas, and no new ones come.",
            "none": f"Release {name}? It gets requests again.",
        }[state]
        self._ask(question, lambda: f"{name}: {self._admin.hold(address, state)} streams here, now {state}")

    def action_migrate(self) -> None:
        request_id = self._chosen("requests")
        if not request_id:
            self._tell("no request is chosen: Tab goes to their table", "red")
            return

        def migrate() -> str:
            done = self._admin.migrate(request_id)
            here, there = self._replica_name(done.moved_from), self._replica_name(done.moved_to)
            return f"moved after {done.num_output_tokens} tokens, from replica {here} to {there}"

        self._ask(f"Move request {plain(request_id)} to another replica? Its stream pauses, then goes on.", migrate)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Explains a request, on Enter."""
        request_id = event.row_key.value or ""
        if event.data_table.id != "requests":
            self._tell("Enter explains a request: Tab goes to their table", "red")
            return

        def explain() -> str:
            explanation = self._admin.explain(request_id)
            self._from_thread(self.push_screen, Explained(explanation, max(self.size.width - 6, 40)))
            return ""

        self._do(explain)

    def _ask(self, question: str, act: Callable[[], str]) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self._do(act)
            else:
                self._tell("nothing was changed")

        self.push_screen(Confirm(question), answered)

    def _do(self, act: Callable[[], str]) -> None:
        """Acts on a thread, and shows what came of it."""

        def acting() -> None:
            try:
                done = act()
            except OctavoError as error:
                self._from_thread(self._tell, str(error), "red")
            else:
                self._from_thread(self._tell, done)

        self.run_worker(acting, thread=True, group="act")

    def _from_thread(self, act: Callable[..., object], *arguments: object) -> None:
        """Calls a function on the application's thread; does nothing once the application has ended."""

        def acting() -> None:
            # While it ends it has no screens.
            if self.screen_stack:
                act(*arguments)

        try:
            self.call_from_thread(acting)
        except RuntimeError:
            if self.is_running:
                raise

    # --- Tables

    def _replica_name(self, address: str) -> str:
        return self._names.get(address) or address

    def _chosen(self, name: str) -> str:
        """Returns the key of the row under the cursor; empty if there is none."""
        table = self._tables[name]
        if not table.row_count:
            return ""
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value or ""


def _fill(table: DataTable[Text], rows: dict[str, list[Text]]) -> None:
    """Updates the rows that are there, so that the cursor and the scroll position stay."""
    keys = [column.value for column in table.columns]
    known = {str(row.value) for row in table.rows}
    for gone in known - rows.keys():
        table.remove_row(gone)
    for name, cells in rows.items():
        if name not in known:
            table.add_row(*cells, key=name)
            continue
        for key, cell in zip(keys, cells, strict=True):
            if table.get_cell(name, str(key)) != cell:
                table.update_cell(name, str(key), cell, update_width=True)
