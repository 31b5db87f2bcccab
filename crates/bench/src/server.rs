//! What the server is and what it takes.

use serde::Serialize;
use serde_json::{Value, json};

use crate::BenchError;
use crate::client::{Answer, Client};
use crate::request::Dialect;

/// The server as it describes itself.
#[derive(Debug, Clone, Serialize)]
pub struct ServerFacts {
    /// The API's address.
    pub url: String,
    /// The model that is measured.
    pub model: String,
    /// Longest prompt and answer together, tokens, if the server says.
    pub max_context_tokens: Option<u64>,
    /// The `Server` header, if any.
    pub server_header: Option<String>,
    /// What `/version` answers, if anything.
    pub version: Option<Value>,
    /// The numerics mode, if `/metrics` names one.
    pub numerics: Option<String>,
    /// What it takes beyond the API's core.
    pub abilities: Abilities,
}

/// Extensions that make a measurement sharper.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Abilities {
    /// `/tokenize` counts a prompt as the endpoint does.
    pub tokenizer: bool,
    /// `ignore_eos` is taken.
    pub ignore_eos: bool,
    /// `min_tokens` is taken.
    pub min_tokens: bool,
}

/// What a server that drafts tokens has counted since it began.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DraftCounters {
    /// Rounds of drafting and verifying.
    rounds: f64,
    /// Drafted tokens that were right.
    accepted: f64,
}

impl DraftCounters {
    /// As the server's metrics have them, if they do.
    pub(crate) async fn read(client: &Client) -> Option<Self> {
        Self::parse(&optional(client, "/metrics").await?.text)
    }

    /// By the names that vLLM gives them.
    fn parse(metrics: &str) -> Option<Self> {
        let rounds = counter(metrics, "vllm:spec_decode_num_drafts_total")?;
        Some(Self { rounds, accepted: counter(metrics, "vllm:spec_decode_num_accepted_tokens_total")? })
    }

    /// Tokens that a round gave, on average since `before`: the accepted ones and one of the model's own.
    pub(crate) fn tokens_per_round_since(self, before: Self) -> Option<f64> {
        let rounds = self.rounds - before.rounds;
        (rounds > 0.0).then(|| 1.0 + (self.accepted - before.accepted) / rounds)
    }
}

/// Asks the server what it is; `model` chooses among several.
pub(crate) async fn look(
    client: &Client,
    url: String,
    model: Option<&str>,
    dialect: Dialect,
) -> Result<ServerFacts, BenchError> {
    let path = "/v1/models";
    let answer = client.get(path).await?;
    let list = answer.json("the list of models", path)?;
    let (model, entry) = choose(&list, model)?;
    let max_context_tokens =
        ["max_model_len", "context_length"].iter().find_map(|name| entry[*name].as_u64());
    let metrics = optional(client, "/metrics").await.map_or(String::new(), |answer| answer.text);
    let abilities = probe(client, &model, dialect).await?;
    Ok(ServerFacts {
        url,
        model,
        max_context_tokens,
        server_header: header(&answer, "server"),
        version: optional(client, "/version")
            .await
            .and_then(|answer| serde_json::from_str(&answer.text).ok()),
        numerics: numerics(&metrics),
        abilities,
    })
}

/// The model's name, and what the list says about it.
fn choose<'a>(list: &'a Value, asked: Option<&str>) -> Result<(String, &'a Value), BenchError> {
    let models = list["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    let named = |entry: &'a Value| entry["id"].as_str().map(|id| (id.to_owned(), entry));
    let found = match asked {
        Some(asked) => models.iter().filter_map(named).find(|(id, _)| id == asked),
        None => models.iter().find_map(named),
    };
    found.ok_or_else(|| {
        let ids: Vec<&str> = models.iter().filter_map(|entry| entry["id"].as_str()).collect();
        match asked {
            Some(asked) if !ids.is_empty() => {
                BenchError::UnknownModel { model: asked.to_owned(), listed: ids.join(", ") }
            }
            _ => BenchError::Answer { what: "the list of models", reason: "it names none".into() },
        }
    })
}

/// Tries the extensions on requests of one token.
async fn probe(client: &Client, model: &str, dialect: Dialect) -> Result<Abilities, BenchError> {
    const TEXT: &str = "One word, please.";
    let plain = count_by_asking(client, model, dialect, TEXT, &[]).await?;
    let mut takes = [false; 2];
    for (taken, field) in takes.iter_mut().zip([("ignore_eos", json!(true)), ("min_tokens", json!(1))]) {
        *taken = match count_by_asking(client, model, dialect, TEXT, &[field]).await {
            Ok(_) => true,
            // Another status is no answer to the question.
            Err(BenchError::Status { status: 400 | 422, .. }) => false,
            Err(error) => return Err(error),
        };
    }
    // A tokenizer that counts otherwise than the endpoint, for lack of a chat template say, is of no use here.
    let tokenizer = count_by_tokenizer(client, model, dialect, TEXT).await.is_ok_and(|count| count == plain);
    Ok(Abilities { tokenizer, ignore_eos: takes[0], min_tokens: takes[1] })
}

/// Tokens of a prompt, by the cheapest way that counts as the endpoint does.
pub(crate) async fn count_tokens(
    client: &Client,
    model: &str,
    dialect: Dialect,
    abilities: Abilities,
    text: &str,
) -> Result<usize, BenchError> {
    if abilities.tokenizer {
        count_by_tokenizer(client, model, dialect, text).await
    } else {
        count_by_asking(client, model, dialect, text, &[]).await
    }
}

/// From the `usage` of a request for one token.
async fn count_by_asking(
    client: &Client,
    model: &str,
    dialect: Dialect,
    text: &str,
    extensions: &[(&str, Value)],
) -> Result<usize, BenchError> {
    let (field, prompt) = dialect.prompt(text);
    let mut body = json!({"model": model, "max_tokens": 1, field: prompt});
    for (name, value) in extensions {
        body[*name] = value.clone();
    }
    let path = dialect.path();
    let answer = client.post(path, &body).await?.json("an answer", path)?;
    answer["usage"]["prompt_tokens"].as_u64().map(|count| count as usize).ok_or(BenchError::NoUsage)
}

/// From the server's tokenizer.
async fn count_by_tokenizer(
    client: &Client,
    model: &str,
    dialect: Dialect,
    text: &str,
) -> Result<usize, BenchError> {
    let (field, prompt) = dialect.prompt(text);
    let path = "/tokenize";
    let answer =
        client.post(path, &json!({"model": model, field: prompt})).await?.json("a token count", path)?;
    answer["count"]
        .as_u64()
        .map(|count| count as usize)
        .ok_or_else(|| BenchError::Answer { what: "a token count", reason: "there is no `count`".into() })
}

/// The answer to something that a server may not have.
async fn optional(client: &Client, path: &str) -> Option<Answer> {
    client.get(path).await.ok().filter(|answer| answer.status == 200)
}

fn header(answer: &Answer, name: &str) -> Option<String> {
    answer.headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// A counter of the Prometheus text, all its labels together.
fn counter(metrics: &str, name: &str) -> Option<f64> {
    let values = metrics.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let rest = if rest.starts_with('{') { rest.split_once('}')?.1 } else { rest };
        rest.strip_prefix(' ')?.split(' ').next()?.parse::<f64>().ok()
    });
    values.reduce(|sum, value| sum + value)
}

/// The label `numerics` of `..._build_info`, which says how the model is computed.
fn numerics(metrics: &str) -> Option<String> {
    let line = metrics.lines().find(|line| !line.starts_with('#') && line.contains("build_info{"))?;
    let (_, rest) = line.split_once("numerics=\"")?;
    Some(rest.split_once('"')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_the_first_or_the_one_asked_for() {
        let list = json!({"data": [{"id": "a", "max_model_len": 7}, {"id": "b"}]});
        assert_eq!(choose(&list, None).unwrap().0, "a");
        assert_eq!(choose(&list, Some("b")).unwrap().0, "b");
        let error = choose(&list, Some("c")).unwrap_err();
        assert_eq!(error.to_string(), "the server does not serve `c`: it lists a, b");
        assert!(choose(&json!({"data": []}), Some("c")).unwrap_err().to_string().contains("names none"));
        assert!(choose(&json!("nonsense"), None).unwrap_err().to_string().contains("names none"));
    }

    #[test]
    fn the_numerics_are_a_label() {
        let metrics = "# HELP qwill_build_info x\nqwill_build_info{version=\"0.1.0\",model=\"tiny\",numerics=\"w4a8 kv=f32\"} 1\n";
        assert_eq!(numerics(metrics).as_deref(), Some("w4a8 kv=f32"));
        assert_eq!(numerics("process_build_info{version=\"1\"} 1\n"), None);
    }

    #[test]
    fn drafts_are_counted_over_all_labels() {
        let metrics = |rounds, accepted| {
            let name = "vllm:spec_decode_num_";
            let text = format!(
                "# TYPE {name}drafts_total counter\n{name}drafts_total{{engine=\"0\"}} {rounds}\n\
                 {name}drafts_total{{engine=\"1\"}} 1.0\n{name}accepted_tokens_total {accepted} 1700000000\n\
                 {name}accepted_tokens_total_created 5\n"
            );
            DraftCounters::parse(&text)
        };
        let (before, after) = (metrics(10.0, 20.0).unwrap(), metrics(20.0, 39.0).unwrap());
        assert_eq!(before, DraftCounters { rounds: 11.0, accepted: 20.0 });
        assert_eq!(after.tokens_per_round_since(before), Some(2.9));
        assert_eq!(after.tokens_per_round_since(after), None);
        assert_eq!(DraftCounters::parse("qwill_uptime_seconds 3\n"), None);
    }
}
