"""The frozen target model behind the narrow interface that heads and the decoder use."""
