"""A model in this process: an engine, and what turns prompts into its requests."""

import weakref
from collections.abc import Callable, Sequence

from configs import features
from configs.options import Options
from octavo.client.errors import from_status
from octavo.client.requests import generate_request
from octavo.client.results import Generation
from octavo.local.desk import LocalItems, LocalModel, LocalText, run_here
from octavo.local.engine import build_engine
from octavo.local.request import LocalRequest, LocalSearch
from octavo.local.running import Asked, Running
from protos import inference_pb2 as pb
from router.errors import RequestError
from router.intake.constraints import canonical_form, compilers
from router.replicas.replica_set import missing_feature
from router.request.media.limits import MediaLimits
from router.request.outputs import Outputs
from router.request.pipeline import resolve
from router.text.tokenizer import Tokenizer
from runtime.grammar.engine import ConstraintCompiler
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory


class InProcess:
    """Loads a model and computes with it here. Not thread-safe, except that `request` may run beside `running`."""

    def __init__(self, options: Options) -> None:
        """Raises ModelNotFoundError, or ValueError for weights that cannot be used."""
        self._tokenizer = Tokenizer(tokenizer_directory(resolve_model(options.model), options.tokenizer))
        self._engine = build_engine(options)
        self.running = Running(self._engine)
        self._model = LocalModel(info=self._engine.model, max_logprobs=options.max_logprobs)
        self._features = features.of_worker(self._model.info) | features.OF_SCHEDULERS
        outputs = Outputs(self._tokenizer, options.tool_call_parser, options.reasoning_parser)
        self._text = LocalText(self._tokenizer, outputs, self._canonical)
        self._items = LocalItems(MediaLimits.of(options))
        self._make_compiler = compilers(self._tokenizer.directory, options.constraint_compile_timeout)
        # Made for the first constraint.
        self._compiler: ConstraintCompiler | None = None
        self._close_compiler: Callable[[], object] = lambda: None

    @property
    def num_preemptions(self) -> int:
        return self._engine.num_preemptions

    def request(self, asked: Asked) -> LocalRequest:
        """Makes a request, or a search if it has a beam_width. Raises OctavoError, as a router's client would."""
        message = generate_request(*asked)
        try:
            resolved = run_here(resolve(message, self._model, self._text, self._items))
            if not resolved.features <= self._features:
                raise missing_feature(resolved.features)
            kind = LocalRequest if resolved.beam_search is None else LocalSearch
            return kind(message, resolved, self._text)
        except RequestError as error:
            raise from_status(error.status.name, str(error), reason=error.reason) from None

    def compute(self, asked: Sequence[Asked]) -> list[Generation]:
        """Raises OctavoError before anything is computed. In any case, no request stays in the engine."""
        requests = [self.request(each) for each in asked]
        try:
            for request in requests:
                self.running.add(request)
            while not all(request.finished for request in requests):
                for error in self.running.take(self.running.step()).values():
                    if error is not None:
                        raise error
        finally:
            self.running.drop_all()
        return [request.generation() for request in requests]

    def close(self) -> None:
        self._close_compiler()

    def _canonical(self, constraint: pb.Constraint) -> pb.Constraint:
        """Raises InvalidConstraint, MissingFeature."""
        if self._compiler is None:
            self._compiler = self._make_compiler(self._model.info)
            self._close_compiler = weakref.finalize(self, self._compiler.close)
        return canonical_form(self._compiler, constraint)
