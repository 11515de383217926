from .probit import ProbitBernoulli
