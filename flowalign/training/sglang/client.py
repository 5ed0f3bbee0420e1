"""Call an SGLang-Diffusion server, and decode its tensors without pickle.

Requests are JSON. `/rollout/generate` answers msgpack, in which a tensor is a map with
`__tensor__: true`, `shape`, `dtype`, and `data`: a safetensors file with the tensor `t`, in base64.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from safetensors import SafetensorError
from safetensors.torch import load

from flowalign.utils.optional import import_optional

MSGPACK = "application/msgpack"


class ServerLost(Exception):
    """Error that a server cannot be reached or does not answer in time; it may return."""


class ServerError(Exception):
    """Answer of a server that would fail again for the same request."""


class SGLangServer:
    """Server at an address. `timeout` is the longest time in seconds to wait for an answer."""

    def __init__(self, url: str, timeout: float):
        self.url, self.timeout = url.rstrip("/"), timeout

    def get(self, path: str) -> Any:
        """Return the JSON answer to a GET request.

        Raises:
            ServerLost: There is no answer.
            ServerError: The server reports an error.
        """
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a POST request, with its tensors decoded.

        Raises:
            ServerLost: There is no answer.
            ServerError: The server reports an error, or the answer is not JSON or safe msgpack.
        """
        return self._call("POST", path, json.dumps(body).encode())

    def _call(self, method: str, path: str, body: bytes | None) -> Any:
        address = urlsplit(self.url)
        kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
        connection = kind(address.netloc, timeout=self.timeout)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content, status = answer.read(), answer.status
        except (OSError, HTTPException) as error:
            raise ServerLost(f"{self.url}{path}: {type(error).__name__} {error}") from error
        finally:
            connection.close()
        if status != 200:
            text = content[:500].decode(errors="replace")
            raise ServerError(f"{self.url}{path} answers {status}: {text}")
        try:
            return decode_answer(content, answer.headers.get_content_type())
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: {error}") from error


def decode_answer(content: bytes, content_type: str) -> Any:
    """Return an answer of a server with decoded tensors.

    Raises:
        ValueError: The type is neither JSON nor msgpack, or a value is not plain data or a tensor.
    """
    if content_type == "application/json":
        return json.loads(content)
    if content_type != MSGPACK:
        raise ValueError(f"the answer is {content_type!r}, not JSON or msgpack: it is not read")
    msgpack = import_optional("msgpack", "sglang")
    return decode_tensors(msgpack.unpackb(content))


def decode_tensors(value: Any) -> Any:
    """Return plain data with every encoded tensor decoded.

    Raises:
        ValueError: A value is of another type, such as bytes, or a tensor is malformed.
    """
    if isinstance(value, list):
        return [decode_tensors(item) for item in value]
    if isinstance(value, dict):
        if "__tensor__" in value:
            return _decode_tensor(value)
        return {name: decode_tensors(item) for name, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"the answer holds a {type(value).__name__}, which is not read")


def _decode_tensor(value: Mapping[str, Any]) -> Any:
    try:
        tensors = load(base64.b64decode(value["data"], validate=True))
        tensor, shape, dtype = tensors["t"], value["shape"], value["dtype"]
    except (KeyError, TypeError, binascii.Error, SafetensorError) as error:
        name = type(error).__name__
        raise ValueError(f"a tensor is not safetensors in base64: {name} {error}") from error
    if list(tensor.shape) != shape or str(tensor.dtype) != dtype:
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} and type {tensor.dtype} is declared as "
            f"{shape} and {dtype}"
        )
    return tensor
