"""The version of the protocol is raised with each change of what is sent."""

import hashlib
import inspect
from types import ModuleType

import msgspec

from cosmos_rl_core.control import protocol
from cosmos_rl_core.rollout.spool import store
from cosmos_rl_core.wire import handshake, payload

DIGEST_OF = {10: "3157196c4741f012"}
"""Digest of the messages of a version. After a change of one raise PROTOCOL_VERSION, and replace this entry."""


def messages(module: ModuleType):
    """Yield each struct of a module with its fields, their types and defaults."""
    for name, found in sorted(vars(module).items()):
        if inspect.isclass(found) and issubclass(found, msgspec.Struct) and found.__module__ == module.__name__:
            config = found.__struct_config__
            fields = [
                (field.encode_name, found.__annotations__[field.name], repr(field.default), field.default_factory)
                for field in msgspec.structs.fields(found)
            ]
            yield name, config.tag, config.array_like, fields


def test_the_messages_are_those_of_the_version():
    every = [list(messages(module)) for module in (protocol, payload, store, handshake)]
    digest = hashlib.blake2b(repr(every).encode(), digest_size=8).hexdigest()
    assert {handshake.PROTOCOL_VERSION: digest} == DIGEST_OF
