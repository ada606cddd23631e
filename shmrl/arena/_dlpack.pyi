from typing import Any

from typing_extensions import Buffer

UNSAID: Any

def capsule(view: Buffer, stream: None, max_version: tuple[int, int] | None, dl_device: Any, copy: Any) -> Any: ...
