"""What a trained adapter is measured with: RULER's tasks (`ruler`, `ruler_run`) and a model for lm_eval."""
