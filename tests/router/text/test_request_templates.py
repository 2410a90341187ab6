"""Templates that come with requests: compiled once, and bounded from the first character."""

import threading

import pytest

from router.text.chat_template import TemplateError
from router.text.request_templates import MAX_TEMPLATES, RequestTemplates

HI = [{"role": "user", "content": "Hi"}]


def render(source: str, templates: RequestTemplates | None = None) -> str:
    templates = RequestTemplates({"bos_token": "<s>"}) if templates is None else templates
    return templates.get(source).render(HI, add_generation_prompt=True)


def test_a_template_knows_the_models_special_tokens() -> None:
    assert render("{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ none }}") == "<s>[Hi]None"


def test_the_last_ones_stay_compiled() -> None:
    templates = RequestTemplates({})
    first = templates.get("first")
    for index in range(MAX_TEMPLATES - 1):
        templates.get(str(index))
    assert templates.get("first") is first
    for index in range(MAX_TEMPLATES):
        templates.get(f"more {index}")
    assert len(templates) == MAX_TEMPLATES
    assert templates.get("first") is not first


def test_threads_share_them() -> None:
    templates = RequestTemplates({})
    threads = [
        threading.Thread(target=lambda: [render(f"{{{{ {index} }}}}", templates) for index in range(3 * MAX_TEMPLATES)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(templates) == MAX_TEMPLATES


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ 'a'.rjust(1000000000) }}",
        "{{ ('a' * 33000000).replace('a', 'bb') }}",
        "{% autoescape 'a'|center(1000000000) %}{% endautoescape %}",
        "{% set x = 'a' * 1000000000 %}",
    ],
)
def test_no_text_grows_beyond_the_bound_not_even_while_it_compiles(source: str) -> None:
    with pytest.raises(TemplateError, match="makes a text of more than"):
        render(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 7 % 4 }}{{ '%05d' % 3 }}{{ '%d and {}' % 99999999999 }}", "30000399999999999 and {}"),
        ("{{ '{} {}'.format(99999999999, 'a') }}{{ 'a%s'|format('b') }}", "99999999999 aab"),
        ("{{ 'ab'|center(4) }}{{ 'abc'.replace('b', 'x') }}{{ 'a\nb'|indent(2) }}", " ab axca\n  b"),
    ],
)
def test_texts_within_the_bound_are_as_in_jinja(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "the request's chat template does not compile"),
        ("{{ " + "(" * 10_000 + ")" * 10_000 + " }}", "the request's chat template does not compile"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "has computed for"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_fails_says_why(source: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.text.bounded_jinja.RENDER_S", 0.05)
    with pytest.raises(TemplateError, match=words):
        render(source)
