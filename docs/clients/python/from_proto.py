"""Streams a completion with nothing but grpcio and the .proto: pip install grpcio grpcio-tools.

python from_proto.py ADDRESS[,ADDRESS...] PROMPT [MAX_TOKENS [SEED]]

If the connection breaks or a router stops, it resumes at the next address with what it has: no token is lost or
repeated.
"""

import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parents[3] / "protos"
MOST_FAILURES = 10  # in a row, without a message in between

# gRPC itself retries what a full router refuses, after the delay in grpc-retry-pushback-ms, a limited number of times.
POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "1s",
    "maxBackoff": "30s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
}
SERVICE_CONFIG = {
    "methodConfig": [{"name": [{"service": "octavo.v1.Inference"}], "retryPolicy": POLICY}],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}


def generated_modules() -> tuple[Any, Any]:
    """Generates messages and stubs from the .proto."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["protoc", f"-I{PROTOS}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
        arguments += [f"--python_out={folder}", f"--grpc_python_out={folder}", "inference.proto"]
        if protoc.main(arguments) != 0:
            sys.exit(f"protoc failed on {PROTOS / 'inference.proto'}")
        sys.path.insert(0, folder)
        return importlib.import_module("inference_pb2"), importlib.import_module("inference_pb2_grpc")


class Held:
    """The client's state of a stream of one choice: all that a resume elsewhere needs."""

    def __init__(self, pb: Any) -> None:
        self.pb = pb
        self.started: Any = None
        self.attempt = 0
        self.token_ids: list[int] = []
        self.text_bytes = 0
        self.finished = False

    def add(self, response: Any) -> str:
        """Takes a message. Returns its new text."""
        if response.HasField("started"):
            self.started, self.attempt = response.started, max(self.attempt, response.started.attempt)
        if not response.HasField("chunk"):
            return ""
        chunk = response.chunk
        if chunk.first_token < len(self.token_ids):
            return ""  # already received
        if chunk.first_token > len(self.token_ids):
            raise RuntimeError(f"tokens {len(self.token_ids)} to {chunk.first_token - 1} are missing")
        self.token_ids += chunk.token_ids
        self.text_bytes += len(chunk.text.encode())
        self.finished = chunk.HasField("finish")
        return chunk.text

    def request(self, first: Any) -> Any:
        """Returns `first` until a stream has started, then its resume."""
        if self.started is None:
            return first
        self.attempt += 1
        choice = self.pb.ResumeChoice(
            index=0, output_token_ids=self.token_ids, text_bytes_delivered=self.text_bytes, finished=self.finished
        )
        resume = self.pb.Resume(
            attempt=self.attempt,
            prompt_token_ids=self.started.prompt_token_ids,
            choices=[choice],
            fingerprint=self.started.fingerprint,
        )
        started = self.started
        return self.pb.GenerateRequest(
            request_id=started.request_id, model=started.model, sampling=started.sampling, resume=resume
        )


def server_went(status: Any) -> bool:
    """True if the server is gone. One that shuts down may drop a new call: CANCELLED as status and whole message."""
    return status.code() is grpc.StatusCode.UNAVAILABLE or status.code().name == status.details() == "CANCELLED"


def main(addresses: str, prompt: str, max_tokens: str = "64", seed: str = "0") -> None:
    pb, rpc = generated_modules()
    options = [("grpc.service_config", json.dumps(SERVICE_CONFIG))]
    stubs = [rpc.InferenceStub(grpc.insecure_channel(address, options)) for address in addresses.split(",")]
    sampling = pb.SamplingParams(max_tokens=int(max_tokens), seed=int(seed))
    first = pb.GenerateRequest(prompt=prompt, sampling=sampling)
    held, failures, turn = Held(pb), 0, 0
    while not held.finished:
        try:
            for response in stubs[turn % len(stubs)].Generate(held.request(first)):
                failures = 0
                print(held.add(response), end="", flush=True)
        except grpc.RpcError as error:
            status: Any = error
            failures += 1
            if not server_went(status) or failures == MOST_FAILURES:
                raise
            print(f"\n[{status.details()}; going on at token {len(held.token_ids)}]", file=sys.stderr)
            turn += 1
            time.sleep(min(0.1 * 2**failures, 2.0))


if __name__ == "__main__":
    main(*sys.argv[1:])
