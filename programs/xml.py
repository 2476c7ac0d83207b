"""A predictor for small models: short prompts, short answers."""

import dspy


class XMLPredict(dspy.Predict):
    """A predictor that speaks XML whatever adapter is configured.

    With SmolLM2's tokenizer this saves a tenth of the demo's prompts and a third of its answers over
    dspy's ChatAdapter. There is no second attempt through JSON: what does not parse is a failure.
    """

    def forward(self, **inputs: object) -> dspy.Prediction:
        """Answer under the XML adapter."""
        with dspy.context(adapter=dspy.XMLAdapter(use_json_adapter_fallback=False)):
            return super().forward(**inputs)

    async def aforward(self, **inputs: object) -> dspy.Prediction:
        """Answer under the XML adapter, asynchronously."""
        with dspy.context(adapter=dspy.XMLAdapter(use_json_adapter_fallback=False)):
            return await super().aforward(**inputs)
