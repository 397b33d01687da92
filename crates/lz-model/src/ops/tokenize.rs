//! Text to tokens and back. The texts themselves never enter a key, only what identifies the tokenizer.

use crate::param::{Param, ParamDefault};
use crate::schema::*;

const TEXTS: Dim = Dim::bucketed("texts", DimKind::Batch).also(&["batch", "batch_size"]);
const LENGTH: Dim = Dim::bucketed("length", DimKind::Seq).also(&["seq_len"]);

const TOKENIZER: Param =
    Param::name("tokenizer_id", "which tokenizer").default(ParamDefault::Required).also(&["tokenizer"]);
const VOCAB_HASH: Param = Param::name("vocab_hash", "SHA-256 of the vocabulary");
const MERGES_HASH: Param = Param::name("merges_hash", "SHA-256 of the merges");
const ADDED_HASH: Param = Param::name("added_tokens_hash", "SHA-256 of the added tokens");
const NORMALIZER: Param = Param::name("normalizer_id", "normalizer and its settings");
const PRETOKENIZER: Param = Param::name("pretokenizer_id", "pre-tokenizer and its settings");
const SPECIAL_HASH: Param = Param::name("special_tokens_hash", "SHA-256 of the special tokens");
const TEXTS_PARAM: Param = Param::dim("texts", "how many texts").also(&["tokens"]);
const LENGTH_PARAM: Param = Param::dim("length", "characters (or tokens) of the longest");

/// Text to token ids.
pub static ENCODE: OpSchema = OpSchema {
    id: "tokenize.encode",
    family: Family::Tokenize,
    kind: OpKind::Tokenization,
    also: &["tokenize"],
    summary: "text to token ids",
    semantics: "the token ids the named tokenizer defines; the same for the same tokenizer_id, vocabulary, merges, \
normalizer, pre-tokenizer, added and special tokens; offsets only when asked for",
    dims: &[TEXTS, LENGTH],
    params: &[
        TOKENIZER,
        VOCAB_HASH,
        MERGES_HASH,
        ADDED_HASH,
        NORMALIZER,
        PRETOKENIZER,
        SPECIAL_HASH,
        Param::bool("return_offsets", false, "also give character offsets"),
        TEXTS_PARAM,
        LENGTH_PARAM,
    ],
    tolerances: Tolerances::Exact,
    bytes: "texts * length",
    ..BLANK
};

/// Token ids to text.
pub static DECODE: OpSchema = OpSchema {
    id: "tokenize.decode",
    family: Family::Tokenize,
    kind: OpKind::Tokenization,
    also: &["detokenize"],
    summary: "token ids to text",
    semantics: "the text the named tokenizer defines for the ids",
    dims: &[TEXTS, LENGTH],
    params: &[
        TOKENIZER,
        VOCAB_HASH,
        MERGES_HASH,
        ADDED_HASH,
        NORMALIZER,
        PRETOKENIZER,
        SPECIAL_HASH,
        TEXTS_PARAM,
        LENGTH_PARAM,
    ],
    tolerances: Tolerances::Exact,
    bytes: "texts * length * 4",
    ..BLANK
};
