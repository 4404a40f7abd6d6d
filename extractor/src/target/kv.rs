//! Keys and values of tokens already seen, one cache a conversation, on one rank.

use std::collections::HashMap;

use super::CacheId;
use super::error::TargetError;

/// The caches that a rank holds.
#[derive(Debug)]
pub(super) struct KvCaches<B> {
    caches: HashMap<CacheId, KvCache<B>>,
}

/// Keys and values of one sequence.
#[derive(Debug)]
pub(super) struct KvCache<B> {
    /// Tokens held in every layer.
    pub(super) tokens: usize,
    /// One entry a decoder layer.
    pub(super) layers: Vec<LayerCache<B>>,
}

/// Keys [tokens, kv heads, qk] and values [tokens, kv heads, v] of one layer.
#[derive(Debug)]
pub(super) struct LayerCache<B> {
    pub(super) keys: B,
    pub(super) values: B,
    /// Tokens that [`LayerCache::keys`] keeps before new ones are appended.
    pub(super) kept: usize,
}

impl<B> KvCaches<B> {
    pub(super) fn new() -> Self {
        Self { caches: HashMap::new() }
    }

    /// Takes a cache out, cut to its first `keep` tokens; an unknown one is made by `make`. A cache
    /// that cannot be cut so stays as it was.
    pub(super) fn take(
        &mut self,
        id: CacheId,
        keep: usize,
        make: impl FnOnce() -> Result<Vec<LayerCache<B>>, TargetError>,
    ) -> Result<KvCache<B>, TargetError> {
        let held = self.caches.get(&id).map_or(0, |cache| cache.tokens);
        if keep > held {
            return Err(TargetError::Cache { cache: id.0, held, keep });
        }
        let mut cache = match self.caches.remove(&id) {
            Some(cache) => cache,
            None => KvCache { tokens: 0, layers: make()? },
        };
        cache.tokens = keep;
        cache.layers.iter_mut().for_each(|layer| layer.kept = keep);
        Ok(cache)
    }

    /// Puts a cache back after a forward.
    pub(super) fn put(&mut self, id: CacheId, cache: KvCache<B>) {
        self.caches.insert(id, cache);
    }

    /// Forgets a cache.
    pub(super) fn drop_cache(&mut self, id: CacheId) {
        self.caches.remove(&id);
    }
}
