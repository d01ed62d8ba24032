"""A conversation as the command line has it: its turns, the settings that were given, and the file that keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeinfer.api.sessions import SavedSession, SessionFile, existing_session
from edgeinfer.cli.settings import Settings, saved_settings
from edgeinfer.errors import UsageError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import AnswerStream
from edgeinfer.runtime.session import ChatSession, TurnSettings
from edgeinfer.types import Constraint


class Talk:
    """One conversation. With a file, it goes on where that ends, and `keep` writes it there.

    `given` and `system` are what the command line says; they count before what the file has.
    """

    def __init__(
        self,
        session: ChatSession,
        recommended: SamplingParams,
        given: Mapping[str, Any],
        *,
        model: str,
        system: str | None = None,
        file: SessionFile | None = None,
    ) -> None:
        self.session = session
        self.model = model
        self.file = file
        self._recommended = recommended
        self.settings = Settings(recommended, given)
        if file is not None and file.saved is not None:
            self._resume(file, file.saved, given)
        if system is not None:
            session.system = system

    def ask(self, text: str, constraint: Constraint | None = None, logprobs: int | None = None) -> AnswerStream:
        """Say something, as `ChatSession.ask`; the rest is of this turn only."""
        self._set_turn()
        self.session.settings = replace(self.session.settings, constraint=constraint, logprobs=logprobs)
        return self.session.ask(text)

    def regenerate(self) -> AnswerStream:
        """Answer the last message again, as `ChatSession.regenerate`."""
        self._set_turn()
        return self.session.regenerate()

    def keep(self) -> None:
        """Write the conversation into its file, if it has one. Raises ResourceError."""
        if self.file is not None:
            self.file.write(SavedSession(self.model, self.settings.given, self.session.state()))

    def save(self, name: str) -> None:
        """Keep the conversation under a name from now on. Raises UsageError where there is one of that name."""
        if self.file is None or self.file.name != name:
            file = SessionFile(name)
            if file.saved is not None:
                file.close()
                raise UsageError(f"there is a session {name} already", "/load it, or choose another name")
            self._hold(file)
        self.keep()

    def load(self, name: str) -> None:
        """Go on with another session. Raises NotFoundError where there is none of that name."""
        if self.file is not None and self.file.name == name:
            raise UsageError(f"this is session {name}", "/clear begins it anew")
        file = existing_session(name)
        try:
            if file.saved is not None:
                self._resume(file, file.saved, {})
        except BaseException:
            file.close()
            raise
        self._hold(file)

    def dropped_note(self) -> str | None:
        """What the last turn left out, in words; None if nothing."""
        dropped = self.session.dropped
        if dropped is None:
            return None
        turns = "the oldest turn" if dropped.n_turns == 1 else f"the {dropped.n_turns} oldest turns"
        return f"the context is full: {turns} ({dropped.n_tokens} tokens) left out from here on"

    def _hold(self, file: SessionFile) -> None:
        if self.file is not None:
            self.file.close()
        self.file = file

    def _resume(self, file: SessionFile, saved: SavedSession, given: Mapping[str, Any]) -> None:
        self.settings = Settings(self._recommended, {**saved_settings(saved.settings, str(file.path)), **given})
        self.session.resume(saved.state)

    def _set_turn(self) -> None:
        settings = self.settings
        keeps = self.file is not None
        self.session.settings = TurnSettings(settings.params, settings.max_tokens, settings.stop, keep_answer=keeps)
