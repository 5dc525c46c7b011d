"""`AsyncEngine`: the engine for servers. This file starts as its contract; the implementation replaces the bodies.

    engine = await AsyncEngine.start(config)
    async for delta in engine.generate(prompt_token_ids, sampling, ...):
        ...

Attributes a server may rely on: `config: EngineConfig`, `tokenizer: frontend.tokenizer.Tokenizer`,
`model_config: models.config.ModelConfig`, `max_model_len: int`, `served_name: str`.
Methods: `generate(...) -> AsyncIterator[OutputDelta]` (closing the iterator aborts the request), `abort(request_id)`,
`stats() -> core.stats.EngineStats`, `reset_prefix_cache() -> bool`, `check_ready()` (raises EngineDead or returns the age of
the loop's last heartbeat), `drain(timeout)`, `stop()`.
"""
