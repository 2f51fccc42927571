"""The wfm domain, whose policies write a digest of their weights after each step: `domain = "recorded:DOMAIN"`."""

from dying import record_weights

from cosmos_rl_wfm.domain import WFM


class Recorded(type(WFM)):
    def build_policy(self, *arguments, **keywords):
        from cosmos_rl_core.train.learner import PolicyLearner
        from cosmos_rl_core.workers.steps import PolicySteps

        record_weights(PolicySteps, PolicyLearner)
        return super().build_policy(*arguments, **keywords)


DOMAIN = Recorded()
