"""LangChain's standard integration tests of a chat model, with ChatOpenAI pointed at a gateway.

The built-in model knows nothing, so what a test demands of its sense is an exception; forms and calls are enforced by
grammars. A bias towards the quote and the brace lets strings end soon, so that forms are complete within the answer.
"""

import os

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        return {
            "model": "keyway-builtin",
            "base_url": os.environ["TEST_API_BASE_URL"],
            "api_key": "none",
            "temperature": 1.0,
            "seed": 7,
            "max_tokens": 600,
            "max_retries": 0,
            "logit_bias": {34: 6, 125: 6},
            "stream_usage": True,
        }

    @property
    def supports_image_inputs(self) -> bool:
        return False

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True
