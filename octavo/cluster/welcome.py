"""The text that `octavo up` prints once the cluster serves: a first completion, addresses, and calls to copy."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from configs.options import Options
from octavo.client.async_client import AsyncClient
from octavo.client.requests import SamplingParams
from octavo.client.results import Delta, Finished
from octavo.cluster.readiness import connectable, router_targets

_QUESTION = "What is the capital of France? Answer briefly."


async def first_completion(targets: Sequence[str], prompt: str, console: Console) -> None:
    """Streams one greedy chat completion to the console, token by token. Raises OctavoError."""
    console.print(f"\n> {prompt}", style="bold", markup=False, highlight=False)
    began = time.monotonic()
    first_token_s = 0.0
    async with AsyncClient(targets) as client:
        stream = client.stream([{"role": "user", "content": prompt}], SamplingParams(temperature=0.0, max_tokens=128))
        async for event in stream:
            if isinstance(event, Delta):
                first_token_s = first_token_s or time.monotonic() - began
                console.out(event.text, end="", highlight=False)
                console.file.flush()
            elif isinstance(event, Finished):
                total_s = time.monotonic() - began
                count = event.usage.completion_tokens
                console.print(
                    f"\n({count} tokens in {total_s:.2f} s, the first after {first_token_s:.2f} s)", style="dim"
                )


def is_guarded(options: Options) -> bool:
    """True if a call needs what this process does not have: an API key, or CAs to trust."""
    return bool(options.api_keys_file or options.tls_cert_file)


def how_to_call(options: Options) -> str:
    """The addresses, and calls to copy."""
    target, *further = router_targets(options)
    at_default = options.port == 50051 and not further
    flag = "" if at_default else f" --target {','.join((target, *further))}"
    known = repr([target, *further]).replace("'", '"') if further else f'"{target}"'
    lines = [""]
    for router, address in enumerate((target, *further)):
        lines.append(f"gRPC      {address}")
        if options.http_port:
            lines.append(f"HTTP      {_http(options, router)}/v1")
            if options.console:
                lines.append(f"console   {_http(options, router)}/console")
        if options.metrics_port:
            for process in range(options.api_server_count):
                port = options.process_metrics_port("router", router, process)
                lines.append(f"metrics   http://{connectable(options.metrics_host)}:{port}/metrics")
    if is_guarded(options):
        needs = {"a key in OCTAVO_API_KEY": options.api_keys_file, "--tls-ca FILE": options.tls_cert_file}
        lines += [
            "",
            f"octavo chat and the other clients need {' and '.join(name for name, on in needs.items() if on)}",
            "",
        ]
        return "\n".join(lines)
    lines += [
        "",
        "Try it, from a shell:",
        "",
        f'  {command()} chat{flag} "{_QUESTION}"',
        "",
        "from Python:",
        "",
        "  from octavo import Client, SamplingParams",
        f"  with Client({known}) as client:",
        f'      print(client.chat("{_QUESTION}", SamplingParams(temperature=0)).text)',
        "",
        *_with_curl(options),
        "with grpcurl (the server describes itself by reflection):",
        "",
        f'  grpcurl -plaintext -d \'{{"chat": {{"messages": [{{"role": "user", "content": "{_QUESTION}"}}]}}, '
        f'"sampling": {{"temperature": 0, "max_tokens": 64}}}}\' \\',
        f"    {target} octavo.v1.Inference/Generate",
        "",
    ]
    return "\n".join(lines)


def command() -> str:
    """The command `octavo` of this environment, as one can type it here: by its path unless PATH finds it."""
    script = Path(sys.executable).with_name("octavo")
    found = shutil.which("octavo")
    if not script.exists() or (found is not None and script.samefile(found)):
        return "octavo"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def _http(options: Options, router: int) -> str:
    scheme = "https" if options.tls_cert_file else "http"
    return f"{scheme}://{connectable(options.host)}:{options.router_http_port(router)}"


def _with_curl(options: Options) -> list[str]:
    if not options.http_port:
        return []
    body = f'{{"messages": [{{"role": "user", "content": "{_QUESTION}"}}], "temperature": 0, "stream": true}}'
    return [
        "over HTTP, as OpenAI's clients do:",
        "",
        f"  curl -N {_http(options, 0)}/v1/chat/completions \\",
        f"    -H 'Content-Type: application/json' -d '{body}'",
        "",
    ]
