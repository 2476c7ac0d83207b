"""vLLM's HTTP interface, as much of it as modpo needs; each failure is told apart and says how to mend it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from modpo.errors import PromptTooLongError, SamplerError

LOAD_TRY_S = 30.0
LOAD_S = 120.0
CONNECT_TRIES = 3
_TOO_LONG = ("maximum context length", "max_model_len", "maximum model length", "longer than the maximum")


@final
class Client:
    """Speaks to one server over kept connections; thread-safe.

    A request is tried again only while no connection could be made: it cannot have been sampled then. One that broke
    later may have been, and would become a second sample of its group.

    Args:
        url: of the server, without a path.
        timeout_s: of one request for a completion; waiting in the server's own queue counts.
        condition: says what became of the server's process, for messages; empty when nothing is known.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0, condition: Callable[[], str] = str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self._condition = condition
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)  # the server limits concurrency
        transport = httpx.HTTPTransport(retries=CONNECT_TRIES, limits=limits)
        self._http = httpx.Client(
            base_url=self.url, transport=transport, timeout=httpx.Timeout(timeout_s, connect=10.0), trust_env=False
        )

    def healthy(self) -> bool:
        """Whether the server answers that it can work."""
        try:
            return self._http.get("/health", timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    def models(self) -> list[dict[str, Any]]:
        """The models the server knows, adapters included (those have a `parent`)."""
        found: list[dict[str, Any]] = self._json(self._send("GET", "/v1/models", timeout=30.0))["data"]
        return found

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The first choice of a completion.

        Raises:
            PromptTooLongError: the prompt and its answer do not fit the server's context.
            SamplerError: the server is gone, overloaded, too slow, or refuses the request.
        """
        response = self._send("POST", "/v1/completions", json=dict(body))
        choice: dict[str, Any] = self._json(response)["choices"][0]
        return choice

    def render(self, model: str, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of chat messages, up to where the answer begins, by the server's own template."""
        body = {"model": model, "messages": [dict(message) for message in messages], "add_generation_prompt": True}
        return tuple(self._json(self._send("POST", "/tokenize", json=body, timeout=30.0))["tokens"])

    def load(self, name: str, folder: str) -> None:
        """Make the server hold an adapter under a name; an adapter of that name counts as loaded."""
        response = self._load({"lora_name": name, "lora_path": folder})
        if response.is_error and "already been loaded" not in response.text:
            raise SamplerError(
                f"the vLLM server at {self.url} does not load {folder} as {name!r}: {_reason(response)}; it needs "
                "--enable-lora, a --max-lora-rank of at least the adapter's, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, "
                "and to see the run folder under the same path"
            )

    def unload(self, name: str) -> None:
        """Make the server drop an adapter; one it does not hold counts as dropped."""
        self._send("POST", "/v1/unload_lora_adapter", timeout=LOAD_TRY_S, json={"lora_name": name}, allowed=(400, 404))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _load(self, body: Mapping[str, str]) -> httpx.Response:
        """Loading twice under a name does no harm, so it may be tried again."""
        again = retry(
            stop=stop_after_delay(LOAD_S), wait=wait_fixed(1), retry=retry_if_exception_type(SamplerError), reraise=True
        )
        return again(self._send)(
            "POST", "/v1/load_lora_adapter", timeout=LOAD_TRY_S, json=dict(body), allowed=(400, 404, 500)
        )

    def _send(self, method: str, path: str, *, allowed: tuple[int, ...] = (), **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.TimeoutException:
            limit = options.get("timeout", self.timeout_s)
            raise SamplerError(
                f"the vLLM server at {self.url} did not answer {path} within {limit:g} s{self._about()}; give it more "
                "time (timeout_s=), or let fewer rollouts run at once (threads=)"
            ) from None
        except httpx.TransportError as error:
            raise SamplerError(
                f"the vLLM server at {self.url} is gone ({type(error).__name__}: {error}){self._about()}; "
                "start it again and resume the run"
            ) from None
        if response.is_error and response.status_code not in allowed:
            raise self._refused(path, response)
        return response

    def _refused(self, path: str, response: httpx.Response) -> Exception:
        reason = _reason(response)
        if response.status_code == 400 and any(words in reason for words in _TOO_LONG):
            return PromptTooLongError(f"the vLLM server says: {reason}")
        advice = "see its log"
        if "cache" in reason.lower():
            advice = "its key-value cache is full: give it more memory, or let fewer rollouts run at once (threads=)"
        return SamplerError(
            f"the vLLM server at {self.url} refuses {path} ({response.status_code}): {reason}{self._about()}; {advice}"
        )

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        try:
            found: dict[str, Any] = response.json()
        except ValueError:
            raise SamplerError(
                f"what answers at {self.url} is no vLLM server: {response.text[:200]!r} is not JSON; check the URL"
            ) from None
        return found

    def _about(self) -> str:
        condition = self._condition()
        return f" ({condition})" if condition else ""


def _reason(response: httpx.Response) -> str:
    """The server's own words."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
