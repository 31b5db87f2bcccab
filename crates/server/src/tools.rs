//! The tools that a request offers to the model, and how the model may choose among them.

use std::collections::HashSet;
use std::sync::Arc;

use qwill_text::OfferedTool;
use serde_json::{Map, Value, json};

use crate::error::{ApiError, show};
use crate::fields::Fields;

const NAME_LIMIT_BYTES: usize = 256;

/// What a request says about tools, whichever endpoint it came to.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ToolSettings {
    /// The tools that may be called, with different names; they are what the prompt tells of.
    pub(crate) tools: Vec<Tool>,
    pub(crate) choice: ToolChoice,
    /// Whether one answer may have several calls.
    pub(crate) parallel: bool,
    /// Whether the request speaks of `functions`, the name that tools had before, and expects the answer to.
    pub(crate) legacy: bool,
}

/// A function that the client can carry out.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// JSON schema of the arguments; `null` when the client gave none.
    pub(crate) parameters: Value,
    /// Whether arguments must meet the schema.
    pub(crate) strict: bool,
    /// As templates expect it: `{"type": "function", "function": {…}}`.
    pub(crate) definition: Value,
}

/// Who decides about calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// There are no calls, and the prompt tells of no tools.
    None,
    /// The model decides.
    Auto,
    /// The model must call some tool.
    Required,
    /// The model must call this tool.
    Named(String),
}

/// What `tool_choice` asks for: how to choose, and among which tools when not among all.
#[derive(Debug, PartialEq)]
pub(crate) struct AskedChoice {
    pub(crate) choice: ToolChoice,
    pub(crate) among: Option<Vec<String>>,
}

impl Default for ToolSettings {
    /// No tools.
    fn default() -> Self {
        Self { tools: Vec::new(), choice: ToolChoice::None, parallel: true, legacy: false }
    }
}

impl ToolSettings {
    /// Brings tools and choice together; without a choice the model decides. `path` is where the choice stands.
    pub(crate) fn new(
        tools: Vec<Tool>,
        asked: Option<AskedChoice>,
        parallel: bool,
        path: &str,
    ) -> Result<Self, ApiError> {
        let AskedChoice { choice, among } =
            asked.unwrap_or(AskedChoice { choice: ToolChoice::Auto, among: None });
        let tools = match among {
            Some(names) => choose(tools, &names, path)?,
            None => tools,
        };
        let choice = match choice {
            ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == name) => {
                return Err(not_offered(&tools, &name, path));
            }
            ToolChoice::Required if tools.is_empty() => {
                let message = format!("`{path}` asks for a tool call, but the request has no `tools`");
                return Err(ApiError::field(path, message).with_code("invalid_value"));
            }
            // Nothing can be called, so there is nothing to decide.
            ToolChoice::Auto if tools.is_empty() => ToolChoice::None,
            choice => choice,
        };
        Ok(Self { tools, choice, parallel, legacy: false })
    }

    /// Whether the answer may have calls.
    pub(crate) fn may_call(&self) -> bool {
        self.choice != ToolChoice::None
    }

    /// The tools whose calls are looked for in an answer; `None` when calls are text.
    pub(crate) fn offered(&self) -> Option<Arc<[OfferedTool]>> {
        let offer =
            |tool: &Tool| OfferedTool { name: tool.name.clone(), parameters: tool.parameters.clone() };
        self.may_call().then(|| self.tools.iter().map(offer).collect())
    }

    /// Whether an answer is over when its first call is.
    pub(crate) fn end_with_call(&self) -> bool {
        !self.parallel || self.is_named()
    }

    /// Whether the request says which tool to call: then the call is the answer, and no news.
    pub(crate) fn is_named(&self) -> bool {
        matches!(self.choice, ToolChoice::Named(_))
    }

    /// What templates are given as `tools`; `None` when the prompt is to tell of none.
    pub(crate) fn definitions(&self) -> Option<Vec<Value>> {
        self.may_call().then(|| self.tools.iter().map(|tool| tool.definition.clone()).collect())
    }
}

impl Tool {
    /// A tool from the function that describes it, which is found at `path`.
    pub(crate) fn new(path: &str, function: Value) -> Result<Self, ApiError> {
        if !function.is_object() {
            return Err(ApiError::value(path, "an object", &function));
        }
        let name = check_name(format!("{path}.name"), &function["name"])?.to_owned();
        let parameters = function["parameters"].clone();
        if !(parameters.is_object() || parameters.is_null()) {
            return Err(ApiError::value(format!("{path}.parameters"), "an object", &parameters));
        }
        let strict = match &function["strict"] {
            Value::Null => false,
            Value::Bool(strict) => *strict,
            other => return Err(ApiError::value(format!("{path}.strict"), "true or false", other)),
        };
        let mut definition = Map::new();
        definition.insert("type".into(), "function".into());
        definition.insert("function".into(), function);
        Ok(Self { name, parameters, strict, definition: definition.into() })
    }
}

impl AskedChoice {
    /// `"none"`, `"auto"`, `"required"`, `{"type": "function", "function": {"name": …}}` or
    /// `{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}`; for the objects, also with their
    /// inner fields one level up.
    pub(crate) fn parse(path: &str, value: Value) -> Result<Self, ApiError> {
        const EXPECTED: &str =
            "\"none\", \"auto\", \"required\", or an object that names a function or allowed tools";
        let mode = |text: &str| match text {
            "none" => Some(ToolChoice::None),
            "auto" => Some(ToolChoice::Auto),
            "required" => Some(ToolChoice::Required),
            _ => None,
        };
        match &value {
            Value::String(text) => mode(text)
                .map(|choice| Self { choice, among: None })
                .ok_or_else(|| ApiError::value(path, EXPECTED, &value)),
            Value::Object(_) if value["type"] == "function" => {
                let (path, name) = named(path, &value);
                let name = check_name(path, name)?;
                Ok(Self { choice: ToolChoice::Named(name.to_owned()), among: None })
            }
            Value::Object(_) if value["type"] == "allowed_tools" => Self::parse_allowed(path, value),
            _ => Err(ApiError::value(path, EXPECTED, &value)),
        }
    }

    fn parse_allowed(path: &str, mut value: Value) -> Result<Self, ApiError> {
        let inner = value["allowed_tools"].take();
        let mut fields = match inner {
            Value::Null => Fields::nested(path, value)?,
            inner => Fields::nested(&format!("{path}.allowed_tools"), inner)?,
        };
        let choice = match fields.string("mode")?.as_deref() {
            Some("auto") | None => ToolChoice::Auto,
            Some("required") => ToolChoice::Required,
            Some(other) => {
                let expected = "\"auto\" or \"required\"";
                return Err(ApiError::value(fields.path("mode"), expected, &other.into()));
            }
        };
        let tools = fields.list("tools")?.unwrap_or_default();
        if tools.is_empty() {
            return Err(ApiError::value(fields.path("tools"), "a list of at least one tool", &json!([])));
        }
        let name = |(index, tool): (usize, &Value)| {
            let (path, name) = named(&format!("{}[{index}]", fields.path("tools")), tool);
            check_name(path, name).map(str::to_owned)
        };
        let among = tools.iter().enumerate().map(name).collect::<Result<_, _>>()?;
        Ok(Self { choice, among: Some(among) })
    }
}

/// Takes `tools`, `tool_choice` and `parallel_tool_calls` of a chat, or `functions` and `function_call`.
pub(crate) fn take_tools(fields: &mut Fields) -> Result<ToolSettings, ApiError> {
    let items = fields.list("tools")?.unwrap_or_default();
    let functions = fields.list("functions")?.unwrap_or_default();
    if !functions.is_empty() {
        if !items.is_empty() {
            let message = "`functions` is the old name of `tools`: send one of them";
            return Err(ApiError::field("functions", message).with_code("invalid_value"));
        }
        return take_functions(fields, functions);
    }
    // Without functions there is nothing that it could ask for.
    ToolSettings::new(Vec::new(), take_function_call(fields)?, false, "function_call")?;
    let tools =
        items.into_iter().enumerate().map(|(index, item)| take_tool(&format!("tools[{index}]"), item));
    let tools = tools.collect::<Result<Vec<_>, _>>()?;
    check_distinct("tools", &tools)?;
    let asked =
        fields.take("tool_choice").map(|value| AskedChoice::parse("tool_choice", value)).transpose()?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    ToolSettings::new(tools, asked, parallel, "tool_choice")
}

/// `"none"`, `"auto"`, or an object that names a function.
fn take_function_call(fields: &mut Fields) -> Result<Option<AskedChoice>, ApiError> {
    match fields.take("function_call") {
        None => Ok(None),
        Some(value @ Value::Object(_)) => {
            let name = check_name("function_call.name".into(), &value["name"])?.to_owned();
            Ok(Some(AskedChoice { choice: ToolChoice::Named(name), among: None }))
        }
        Some(value) => AskedChoice::parse("function_call", value).map(Some),
    }
}

/// The way of asking before there were tools: functions, of which one at most is called.
fn take_functions(fields: &mut Fields, functions: Vec<Value>) -> Result<ToolSettings, ApiError> {
    let tools = functions.into_iter().enumerate();
    let tools = tools.map(|(index, function)| Tool::new(&format!("functions[{index}]"), function));
    let tools = tools.collect::<Result<Vec<_>, _>>()?;
    check_distinct("functions", &tools)?;
    let asked = take_function_call(fields)?;
    let settings = ToolSettings::new(tools, asked, false, "function_call")?;
    Ok(ToolSettings { legacy: true, ..settings })
}

fn take_tool(path: &str, mut item: Value) -> Result<Tool, ApiError> {
    if !item.is_object() {
        return Err(ApiError::value(path, "an object", &item));
    }
    if item["type"] != "function" {
        return Err(ApiError::value(format!("{path}.type"), "\"function\"", &item["type"]));
    }
    Tool::new(&format!("{path}.function"), item["function"].take())
}

/// Two tools of one name could not be told apart in a call.
pub(crate) fn check_distinct(path: &str, tools: &[Tool]) -> Result<(), ApiError> {
    let mut seen = HashSet::new();
    match tools.iter().find(|tool| !seen.insert(tool.name.as_str())) {
        None => Ok(()),
        Some(tool) => {
            let rule = format!("`{path}` has two tools of the same name");
            let message = format!("{rule}, {}", show(&tool.name.as_str().into()));
            Err(ApiError::field(path, message).with_code("invalid_value").logged_as(rule))
        }
    }
}

/// The name in an object that names a function, and its path: in `function`, or one level up.
fn named<'a>(path: &str, value: &'a Value) -> (String, &'a Value) {
    match &value["function"] {
        Value::Null if !value["name"].is_null() => (format!("{path}.name"), &value["name"]),
        function => (format!("{path}.function.name"), &function["name"]),
    }
}

/// A name that can stand in a call as any template writes it.
fn check_name(path: String, name: &Value) -> Result<&str, ApiError> {
    let fits = |text: &&str| {
        let plain = |c: char| !c.is_control() && !"<>\"'".contains(c);
        !text.is_empty() && text.trim() == *text && text.len() <= NAME_LIMIT_BYTES && text.chars().all(plain)
    };
    name.as_str().filter(fits).ok_or_else(|| {
        let expected = format!(
            "a string that is not empty, of at most {NAME_LIMIT_BYTES} bytes, without quotes, angle brackets, \
             control characters or spaces at its ends"
        );
        ApiError::value(path, &expected, name)
    })
}

fn choose(mut tools: Vec<Tool>, names: &[String], path: &str) -> Result<Vec<Tool>, ApiError> {
    if let Some(name) = names.iter().find(|name| !tools.iter().any(|tool| tool.name == **name)) {
        return Err(not_offered(&tools, name, path));
    }
    tools.retain(|tool| names.contains(&tool.name));
    Ok(tools)
}

fn not_offered(tools: &[Tool], name: &str, path: &str) -> ApiError {
    let rule = format!("`{path}` names a function that `tools` does not have");
    let offered: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
    let message =
        format!("{rule}: {}; the request has the tools {}", show(&name.into()), show(&offered.into()));
    ApiError::field(path, message).with_code("invalid_value").logged_as(rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(body: Value) -> Result<ToolSettings, ApiError> {
        let Value::Object(map) = body else { panic!("not an object") };
        take_tools(&mut Fields::new(map))
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn the_model_decides_where_the_request_does_not() {
        let found = settings(json!({"tools": [tool("f"), tool("g")]})).unwrap();
        assert_eq!((found.choice, found.parallel), (ToolChoice::Auto, true));
        let names: Vec<&str> = found.tools.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(names, ["f", "g"]);
        assert_eq!(found.tools[0].definition, tool("f"));
        for nothing in [json!({}), json!({"tools": null}), json!({"tools": [], "tool_choice": "auto"})] {
            let found = settings(nothing).unwrap();
            assert_eq!(found, ToolSettings::default());
            assert_eq!(found.definitions(), None);
        }
    }

    #[test]
    fn choices_are_read_in_every_spelling() {
        let choice = |value: Value| {
            settings(json!({"tools": [tool("f"), tool("g")], "tool_choice": value})).unwrap().choice
        };
        assert_eq!(choice(json!("none")), ToolChoice::None);
        assert_eq!(choice(json!("required")), ToolChoice::Required);
        let named = ToolChoice::Named("g".into());
        assert_eq!(choice(json!({"type": "function", "function": {"name": "g"}})), named);
        assert_eq!(choice(json!({"type": "function", "name": "g"})), named);
    }

    #[test]
    fn allowed_tools_are_the_only_ones() {
        let body = json!({
            "tools": [tool("f"), tool("g")],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}},
        });
        let found = settings(body).unwrap();
        assert_eq!(found.choice, ToolChoice::Required);
        assert_eq!(found.definitions(), Some(vec![tool("g")]));
    }

    #[test]
    fn functions_are_tools_under_an_older_name() {
        let function = json!({"name": "f"});
        let found = settings(json!({"functions": [function], "function_call": {"name": "f"}})).unwrap();
        assert_eq!(found.choice, ToolChoice::Named("f".into()));
        assert_eq!(found.tools[0].definition, json!({"type": "function", "function": function}));
        assert!(found.legacy && !found.parallel);
        let error = settings(json!({"functions": [function], "tools": [tool("f")]})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("functions"));
    }

    #[test]
    fn errors_name_the_field() {
        let cases = [
            (json!({"tools": [tool("f"), tool("f")]}), "tools", "the same name, \"f\""),
            (json!({"tools": [tool("a<b")]}), "tools[0].function.name", "without quotes"),
            (json!({"tool_choice": "required"}), "tool_choice", "has no `tools`"),
            (json!({"tool_choice": "maybe"}), "tool_choice", "got \"maybe\""),
            (json!({"tool_choice": {"type": "function"}}), "tool_choice.function.name", "got null"),
            (
                json!({"tools": [tool("f")], "tool_choice": {"type": "function", "name": "h"}}),
                "tool_choice",
                r#""h"; the request has the tools ["f"]"#,
            ),
            (
                json!({"tools": [tool("f")], "tool_choice": {"type": "allowed_tools", "tools": []}}),
                "tool_choice.tools",
                "at least one",
            ),
            (json!({"parallel_tool_calls": 1}), "parallel_tool_calls", "true or false, got 1"),
        ];
        for (body, param, part) in cases {
            let error = settings(body.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
            assert!(error.message.contains(part), "{body}: {}", error.message);
        }
    }
}
