"""Chat templates: what Hugging Face's use, and what a hostile one tries."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from processes import PATIENCE_S, ended_cpu_s

from edgeinfer.errors import UnusableInputError
from edgeinfer.runtime import template as template_module
from edgeinfer.runtime.template import MAX_TEMPLATE_CHARS, ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def test_a_usual_template_renders_as_transformers_does():
    assert ChatTemplate(CHATML).render(HELLO) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHATML).render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_begin_and_end_tokens_are_variables():
    assert ChatTemplate("{{ bos_token }}x{{ eos_token }}", bos="<s>", eos="</s>").render(HELLO) == "<s>x</s>"


def test_json_is_not_escaped_for_the_web():
    template = ChatTemplate("{{ messages[0].content | tojson }}")
    assert template.render([{"role": "user", "content": "<é'&>"}]) == '"<é\'&>"'


def test_loop_controls_generation_blocks_and_the_date_work():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert ChatTemplate(source).render(HELLO * 3) == "hello4"


def test_blocks_take_their_line_with_them():
    assert ChatTemplate("a\n  {% if true %}\nb\n  {% endif %}\nc").render(HELLO) == "a\nb\nc"


def test_what_the_template_refuses_is_said_in_its_words():
    with pytest.raises(UnusableInputError, match="System role not supported"):
        ChatTemplate("{{ raise_exception('System role not supported') }}").render(HELLO)


def test_a_syntax_error_names_the_line():
    with pytest.raises(UnusableInputError, match=r"line 2"):
        ChatTemplate("fine\n{% if %}").render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% set ns = namespace(s='a' * 16) %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ ('a' * 1000000).replace('a', 'a' * 1000000) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ undefined_thing.attribute }}",
    ],
)
def test_hostile_and_broken_templates_end_in_an_error(source, monkeypatch):
    monkeypatch.setattr("edgeinfer.runtime.template.MAX_SECONDS", 1)  # one of them takes all of it
    before_s = ended_cpu_s()
    with pytest.raises(UnusableInputError):
        ChatTemplate(source).render(HELLO)
    assert ended_cpu_s() - before_s < 10


def test_a_template_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr("edgeinfer.runtime.template.MAX_SECONDS", 0.5)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    before_s = ended_cpu_s()
    with pytest.raises(UnusableInputError, match="too much time or memory"):
        ChatTemplate(loop).render(HELLO)
    assert ended_cpu_s() - before_s < 5


def test_a_template_that_writes_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr("edgeinfer.runtime.template.MAX_OUTPUT_CHARS", 1000)
    with pytest.raises(UnusableInputError, match="more than 1000 characters"):
        ChatTemplate("{% for i in range(99999) %}x{% endfor %}").render(HELLO)


def test_a_huge_template_is_refused_unread_but_only_when_it_is_needed():
    template = ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1))
    with pytest.raises(UnusableInputError, match="more than"):
        template.render(HELLO)


def test_a_template_that_writes_nothing_is_at_fault():
    with pytest.raises(UnusableInputError, match="writes nothing"):
        ChatTemplate("{% if false %}x{% endif %}").render(HELLO)


def test_rendering_leaves_no_process_and_works_beside_threads():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(PATIENCE_S,))
    thread.start()
    try:
        for _ in range(5):
            assert ChatTemplate("ok").render(HELLO) == "ok"
    finally:
        done.set()
        thread.join(PATIENCE_S)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no child process without fork")
def test_a_child_whose_parent_has_gone_goes_too():
    """Otherwise it would keep the standard streams open: whoever reads the program's output would wait for ever."""
    script = """
import os, signal
from edgeinfer.runtime import template
template.preload()
signal.set_wakeup_fd(os.open(os.devnull, os.O_WRONLY | os.O_NONBLOCK), warn_on_full_buffer=False)
template._read_all = lambda *_: os._exit(3)  # a signal ends the program in the middle of rendering
template.ChatTemplate("{{ 'x' * 1000000 }}").render([])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"", b"")


def test_no_child_begins_while_another_thread_is_inside_jinja2(monkeypatch):
    """It would wait for the locks that the thread holds, and be ended as too slow."""
    inside, forks = threading.Event(), []

    def render(*arguments, real=template_module._render):
        inside.set()
        time.sleep(0.05)
        text = real(*arguments)
        inside.clear()
        return text

    def fork(real=os.fork):
        forks.append(inside.is_set())
        monkeypatch.undo()
        return real()

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(template_module, "_render", render)
    thread = threading.Thread(target=template_module.preload)
    thread.start()
    assert inside.wait(PATIENCE_S)
    assert template_module._render_in_child("ok", {}) == "ok"
    thread.join(PATIENCE_S)
    assert forks == [False]


def test_threads_that_render_at_once_do_not_wait_for_each_other():
    texts = []
    sources = ["{% for i in range(100) %}{% for j in range(1000) %}{% endfor %}{% endfor %}slow", *["quick"] * 5]
    threads = [threading.Thread(target=lambda s=s: texts.append(ChatTemplate(s).render(HELLO))) for s in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(texts) == [*["quick"] * 5, "slow"]


def test_any_unicode_comes_back():
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "a\0é😀"}]) == "a\0é😀"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no child process without fork")
def test_a_terminals_ctrl_c_which_reaches_the_child_too_does_not_end_it(monkeypatch):
    rendered = threading.Event()

    def bother(pid):
        with suppress(ProcessLookupError):
            while not rendered.wait(0.001):
                os.kill(pid, signal.SIGINT)

    def fork(real=os.fork):
        pid = real()
        if pid:
            threading.Thread(target=bother, args=(pid,), daemon=True).start()
        return pid

    monkeypatch.setattr(os, "fork", fork)
    previous = signal.signal(signal.SIGINT, lambda *_: None)  # as while an answer is being made
    try:
        work = "{% for i in range(300) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
        assert ChatTemplate(work + "done").render([]) == "done"
    finally:
        rendered.set()
        signal.signal(signal.SIGINT, previous)
