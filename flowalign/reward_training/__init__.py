"""Train reward models, and measure their agreement with annotators."""
