"""A predictor for which whatever a model says is an answer, so that untrained models run whole programs."""

import dspy

from tests.e2e.model import Terse


class Lenient(Terse):
    """Short prompts; every output field is the first letters of what was said."""

    def parse(self, signature, completion):
        return dict.fromkeys(signature.output_fields, completion[:8])


class LenientPredict(dspy.Predict):
    def forward(self, **inputs):
        with dspy.context(adapter=Lenient(use_json_adapter_fallback=False)):
            return super().forward(**inputs)
