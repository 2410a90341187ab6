"""No chat keeps a template busy for long, or makes it fill the memory."""

import asyncio

import pytest

from router.text import bounded_jinja
from router.text.chat_template import ChatTemplate, TemplateError

MESSAGES = [{"role": "user", "content": "x"}] * 10_000
LOOP = "{% for a in messages %}"


def render(source: str, **arguments: object) -> str:
    return ChatTemplate(source, {}).render(MESSAGES, add_generation_prompt=True, arguments=arguments)


@pytest.mark.parametrize(
    "source",
    [
        # 10^12 rounds: days.
        LOOP * 3 + "{% endfor %}" * 3,
        # Filters, conditions.
        LOOP * 2 + "{% for b in messages|map('length') if b > 9 %}{% endfor %}" + "{% endfor %}" * 2,
        # 2^60 calls, without a loop.
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
        "{% for n in tree recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
        # Lists that another list is searched for.
        "{% for a in tree %}{% for b in tree %}{{ '' if [a, b] in tree else '' }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_jinja, "RENDER_S", 0.2)
    with pytest.raises(TemplateError, match=r"computed for 0\.2 s without an end: send fewer messages"):
        render(source, tree=list(range(10_000)))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        # Tools of 100 kB for each message: 1 GB.
        (LOOP + "{{ text }}{% endfor %}", "text of more than 33554432 characters"),
        ("{% macro all() %}" + LOOP + "{{ text }}{% endfor %}{% endmacro %}{{ all()|length }}", "text of more than"),
        ("{% set all %}" + LOOP + "{{ text }}{% endfor %}{% endset %}{{ all|length }}", "text of more than"),
        ("{{ ' ' * number }}", "text of more than"),
        ("{{ number * [1] }}", "text of more than"),
        ("{{ number ** number }}", "more than 65536 bits"),
    ],
)
def test_a_template_can_not_fill_the_memory(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        render(source, text="x" * 100_000, number=2**40)


def test_what_templates_do_with_loops_still_works() -> None:
    source = (
        "{% for m in few %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.previtem }}"
        "{{ loop.nextitem }}{{ loop.revindex0 }};{% else %}none{% endfor %}"
        "{% for m in [] %}x{% else %}none{% endfor %}{% for m in missing %}x{% else %}none{% endfor %}"
        "{% for k, v in d.items() if v > 1 %}{{ k }}{{ v }}{% endfor %}{% for k in d %}{{ k }}{% endfor %}"
        "{% for c in text[::-1] %}{{ c }}{% endfor %}{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}"
        "{{ n }}{% endfor %}{{ 3 * 'ab' }}{{ 2 ** 10 }}{{ 2.5 * 2 }}"
        "{% for t in nested recursive %}({{ t.n }}{{ loop(t.of) if t.of }}){% endfor %}"
    )
    rendered = render(
        source, few=["a", "b"], d={"k": 1, "l": 2}, text="xyz", nested=[{"n": 1, "of": [{"n": 2, "of": []}]}]
    )
    assert rendered == "1/2TrueFalseb1;2/2FalseTruea0;nonenonel2klzyx1ababab10245.0(1(2))"


async def test_threads_render_with_bounds_of_their_own() -> None:
    template = ChatTemplate(LOOP + "{{ a.content }}{% endfor %}", {})
    texts = await asyncio.gather(
        *(asyncio.to_thread(template.render, MESSAGES, add_generation_prompt=True) for _ in range(4))
    )
    assert texts == ["x" * 10_000] * 4
